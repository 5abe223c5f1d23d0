"""From a JSON schema to a grammar: every keyword enforced exactly, or the schema refused with its pointer."""
