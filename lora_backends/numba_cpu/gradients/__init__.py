"""The backward of dense layers: `launch` runs the `kernels`, which call the `products`."""
