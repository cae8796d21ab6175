"""What a model is written in: one protocol, one implementation per kind of device."""
