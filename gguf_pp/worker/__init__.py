"""The other end of remote stages: lends this machine's devices to clients."""
