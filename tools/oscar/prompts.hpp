#pragma once
// Prompts of a JSONL file as the model reads them: with its own chat template.

#include "llama_session.hpp"
#include "text.hpp"

namespace oscar::tool {

// A file whose name ends in .jsonl becomes text. Every line is an object with one of
//   "messages": [{"role": "user", "content": "..."}, ...]   through the model's chat template
//   "prompt": "..."                                         one message of the user, the same
//   "text": "..."                                           as it is
// Control tokens that the template writes are then read as such. Other files stay as they are.
// Errors: kBadInput with the line, when one is none of these, or the model has no chat template that llama.cpp knows.
Status render_prompts(TextFile& file, const Model& model);

}  // namespace oscar::tool
