from pathlib import Path

#: The checkout.
ROOT = Path(__file__).resolve().parents[1]
