"""``python -m nd_rotary_encodings``: what this build is and what it will use here."""

from . import build_info

for key, value in build_info().items():
    print(f"{key + ':':24}{', '.join(value) if isinstance(value, list) else value}")
