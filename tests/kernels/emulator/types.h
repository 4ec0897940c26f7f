// What a CUDA compiler knows by itself. Before common.cu.
#pragma once
#define EMULATOR
#define DEV inline
#define DYNAMIC_SHARED(type, name, alignment) type* name = reinterpret_cast<type*>(shared_memory)
#define __CUDA_ARCH__ 900
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
