"""One call of a model: the entries of its rows, and the plans of its passes."""
