"""Forward and backward as one graph of functional ops."""
