# Apache Arrow's C++ library, for reading Parquet files: optional, as Debian 12 has no package of it. It is taken from
# its own CMake package, or else from the pyarrow wheel of the Python in SPS_PYTHON, which brings headers and libraries.
#   SPS_HAS_PARQUET     whether it was found and a program links with it
#   SPS_ARROW           the target to link
#   SPS_PYARROW_PYTHON  a Python with pyarrow, with which tests write Parquet files; or empty
option(SPS_PARQUET "Read Parquet files if Arrow's C++ library is found" ON)
find_program(SPS_PYTHON NAMES python3 python DOC "Python; its pyarrow serves to read Parquet files")

set(SPS_HAS_PARQUET OFF)
set(SPS_PYARROW_PYTHON "")
add_library(SPS_ARROW INTERFACE IMPORTED)
if(SPS_PARQUET)
  if(SPS_PYTHON)
    execute_process(
      COMMAND ${SPS_PYTHON} -c "import pyarrow as a, pyarrow.parquet; print(a.get_include(), *a.get_library_dirs(), sep=';')"
      OUTPUT_VARIABLE pyarrow RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(failed STREQUAL "0")
      set(SPS_PYARROW_PYTHON ${SPS_PYTHON})
    endif()
  endif()

  find_package(Arrow CONFIG QUIET)
  find_package(Parquet CONFIG QUIET)
  set(origin "")
  if(TARGET Parquet::parquet_shared)
    target_link_libraries(SPS_ARROW INTERFACE Parquet::parquet_shared Arrow::arrow_shared)
    set(origin "${Arrow_DIR}")
  elseif(TARGET Parquet::parquet_static)
    target_link_libraries(SPS_ARROW INTERFACE Parquet::parquet_static Arrow::arrow_static)
    set(origin "${Arrow_DIR}")
  elseif(SPS_PYARROW_PYTHON)
    list(POP_FRONT pyarrow include)
    foreach(folder ${pyarrow})
      if(NOT origin)
        file(GLOB libraries ${folder}/libparquet.so.* ${folder}/libparquet.dylib ${folder}/libarrow.so.* ${folder}/libarrow.dylib)
        if(libraries)
          target_link_libraries(SPS_ARROW INTERFACE ${libraries})
          target_include_directories(SPS_ARROW INTERFACE ${include})
          set(origin ${folder})
        endif()
      endif()
    endforeach()
  endif()

  if(origin)
    # A library of another compiler or C++ standard may be found and yet not link.
    if(NOT origin STREQUAL "${SPS_ARROW_ORIGIN}")
      unset(SPS_ARROW_LINKS CACHE)
      set(SPS_ARROW_ORIGIN "${origin}" CACHE INTERNAL "Where SPS_ARROW_LINKS was tried")
    endif()
    include(CheckCXXSourceCompiles)
    set(CMAKE_REQUIRED_LIBRARIES SPS_ARROW)
    check_cxx_source_compiles("
      #include <parquet/api/reader.h>
      int main() { return parquet::ParquetFileReader::OpenFile(\"x\")->metadata()->num_columns(); }" SPS_ARROW_LINKS)
    unset(CMAKE_REQUIRED_LIBRARIES)
    set(SPS_HAS_PARQUET ${SPS_ARROW_LINKS})
  endif()
endif()
if(SPS_HAS_PARQUET)
  message(STATUS "Parquet: Arrow in ${origin}")
else()
  message(STATUS "Parquet: no; -DSPS_PYTHON=PYTHON takes Arrow from that Python's pyarrow")
endif()
