"""A look inside a model: `bft-inspect`, its page, and what attention sinks and gates do by context length."""
