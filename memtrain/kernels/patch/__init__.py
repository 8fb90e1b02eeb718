"""4x4 patches of feature maps at two bits a value."""
