cmake_minimum_required(VERSION 3.28)
project(pybind11_shim CXX)
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
find_package(pybind11 CONFIG REQUIRED PATHS "${KVQ_PYBIND11_DIR}" NO_DEFAULT_PATH)
