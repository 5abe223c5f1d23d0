"""What `deepinfer schema` does: check one schema, score a set of them."""
