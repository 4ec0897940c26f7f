// Entry points for ctypes: every CTA of a grid, one after the other. After the kernels.
#pragma once

template <class Args> void launch(void (*kernel)(Args), const int* grid, int threads, const void* args) {
  gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
  for (unsigned z = 0; z < gridDim.z; z++)
    for (unsigned y = 0; y < gridDim.y; y++)
      for (unsigned x = 0; x < gridDim.x; x++) {
        blockIdx = {x, y, z};
        std::memset(shared_memory, 0xFF, sizeof shared_memory);
        barriers.clear();
        for (auto& mine : copies) mine.clear();
        Block::self().run(threads, [&] { kernel(*static_cast<const Args*>(args)); });
      }
}
#define LAUNCH(kernel) \
  extern "C" void launch_##kernel(const int* grid, int threads, const void* args) { launch(kernel, grid, threads, args); }
