"""Host memory: buffers, copies from devices, and tensors that stay stable while they are copied."""
