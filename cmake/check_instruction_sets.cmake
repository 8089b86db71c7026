# Fails the build if a file that is compiled for one host instruction set (INSTRUCTION_SETS) leaves
# anything in OBJECTS that a processor without that set may run: code that runs when the library is
# loaded, or a function that other files share, whose copy the linker may take from here.
foreach(isa IN LISTS INSTRUCTION_SETS)
  foreach(object IN LISTS OBJECTS)
    if(NOT object MATCHES "_${isa}\\.cpp")
      continue()
    endif()
    execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
    foreach(symbol IN LISTS symbols)
      # T, W: functions that are seen outside the file. What carries the set's namespace is its own.
      if(symbol MATCHES " [TW] " AND NOT symbol MATCHES "::${isa}::" OR symbol MATCHES "_GLOBAL__")
        string(REGEX REPLACE "^.*  *[TWt] " "" symbol "${symbol}")
        message(SEND_ERROR "${object} would run ${isa} code on every processor: ${symbol}")
      endif()
    endforeach()
  endforeach()
endforeach()
