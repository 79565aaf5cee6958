"""Hand-written mutations of the product, each a defect that the suite should detect."""
