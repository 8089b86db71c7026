"""Host path of the gfx942 engine: the HIP run-time it opens, its plans, its launches."""
