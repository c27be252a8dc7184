"""Every kernel family behind one call: `build(variant, schedule, device)` gives the TensorIR module."""
