"""fp8 matmuls: current and delayed scaling, native and emulated."""
