# Precompiles the headers that nearly every source of these libraries includes: reading them is most of the time that a
# file takes. Included right after ONNX Runtime's project(), it waits for the end of its CMakeLists.txt, when the
# targets exist. An upstream header that moves is left out, and a source whose flags differ reads the plain headers.

function(kvq_precompile_headers)
  set(headers
    core/common/common.h
    core/framework/op_kernel.h
    core/graph/graph.h
    core/graph/graph_viewer.h
    core/platform/threadpool.h
  )
  foreach(target onnxruntime_framework onnxruntime_optimizer onnxruntime_providers onnxruntime_session)
    if(TARGET ${target})
      foreach(header IN LISTS headers)
        if(EXISTS "${REPO_ROOT}/onnxruntime/${header}" OR EXISTS "${REPO_ROOT}/include/onnxruntime/${header}")
          # In brackets: an absolute path would give every checkout compiler cache keys of its own.
          target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
        endif()
      endforeach()
      if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
        # What ccache needs to see through a precompiled header.
        target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
      endif()
    endif()
  endforeach()
endfunction()

cmake_language(DEFER CALL kvq_precompile_headers)
