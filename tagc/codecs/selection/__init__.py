"""Selection: which groups a rank sends, by a threshold that follows the density, or by a support
that ranks share."""
