"""Published KV-cache quantisers that are compared with and not served.

per_token    naive, QuaRot, INT4 + Hadamard, and the V of KIVI
per_channel  the K of KIVI and of Kitty: per channel over a block of tokens
turboquant   random rotation, stored norm, Lloyd-Max codebook
fp8          SGLang's fp8_e4m3
"""
