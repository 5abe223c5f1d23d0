"""Training of DSpark drafts: `python -m deepinfer_specdec.train --help`."""
