# cmake -DNM=<nm> -DOBJECTS=<list> -P CheckNoWeakSymbols.cmake
#
# Fails if an object defines a weak or unique symbol that other objects could be linked to.

execute_process(COMMAND ${NM} --demangle --defined-only ${OBJECTS}
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
if(weak)
  list(JOIN weak "\n  " lines)
  message(FATAL_ERROR "weak symbols compiled for one instruction set:\n  ${lines}")
endif()
