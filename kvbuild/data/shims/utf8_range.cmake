cmake_minimum_required(VERSION 3.28)
project(utf8_range C)
