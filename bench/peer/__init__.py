"""The server that a bench measures: this product, and beside it in the same process a bare peer."""
