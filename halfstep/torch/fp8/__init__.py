"""fp8 matmuls: current and delayed scaling, native and emulated, and the loss of a head that has them."""
