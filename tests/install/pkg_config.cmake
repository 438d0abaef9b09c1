# Compiles and runs the consumer with nothing but pkg-config's answer.
set(ENV{PKG_CONFIG_PATH} ${PREFIX}/${LIBDIR}/pkgconfig)
execute_process(COMMAND pkg-config --cflags --libs oscar OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
execute_process(COMMAND ${CXX} -std=c++20 ${SOURCE} -o ${OUT} ${flags} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${OUT} COMMAND_ERROR_IS_FATAL ANY)
