"""KV that leaves the device and comes back: host buffers, copies, disk."""
