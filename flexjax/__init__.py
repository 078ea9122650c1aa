"""flexjax: programmable attention for JAX."""
