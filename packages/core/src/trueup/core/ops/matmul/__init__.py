"""Matrix products: grouped by expert, batched by head, and in int8."""
