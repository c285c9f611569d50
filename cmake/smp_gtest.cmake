# Defines smp_gtest: the system's googletest, or the copy in third_party when
# there is none or torch uses the other std::string ABI.

if(SMP_TORCH_CXX11_ABI)
  find_package(GTest QUIET)
endif()
add_library(smp_gtest INTERFACE)
if(TARGET GTest::gtest_main)
  target_link_libraries(smp_gtest INTERFACE GTest::gtest GTest::gtest_main)
  message(STATUS "googletest: system")
else()
  set(gtest ${CMAKE_SOURCE_DIR}/third_party/googletest)
  add_library(smp_gtest_copy STATIC EXCLUDE_FROM_ALL
    ${gtest}/src/gtest-all.cc ${gtest}/src/gtest_main.cc)
  target_include_directories(smp_gtest_copy SYSTEM
    PUBLIC ${gtest}/include PRIVATE ${gtest})
  target_link_libraries(smp_gtest_copy PUBLIC Threads::Threads)
  target_link_libraries(smp_gtest INTERFACE smp_gtest_copy)
  message(STATUS "googletest: third_party")
endif()
