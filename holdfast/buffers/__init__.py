"""Host memory: buffers, copies from devices, and tensors that hold still while they are copied."""
