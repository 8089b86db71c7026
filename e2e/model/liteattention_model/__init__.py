"""The small trained model: a folder that diffusers loads, and where it is."""

from pathlib import Path

MODEL = Path(__file__).parent / "wan-shapes"
