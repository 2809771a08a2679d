// What runtime.cpp and device.cpp share.
#pragma once
#include <cuda_runtime_api.h>
#include <cstddef>

#define API extern "C" __attribute__((visibility("default")))

size_t memory_of_the_gpu();
cudaError_t said(cudaError_t error);  // keeps an error for cudaGetLastError
