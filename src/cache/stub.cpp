namespace oscar {}
