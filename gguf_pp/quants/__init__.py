"""Block formats: reference dequantization, planes, products."""
