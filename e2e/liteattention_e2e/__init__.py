"""End-to-end suite: real videos from diffusers pipelines, dense and with LiteAttention."""
