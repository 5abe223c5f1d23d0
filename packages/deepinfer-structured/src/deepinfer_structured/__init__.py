"""Sound structured output: every schema enforced or refused with a reason."""
