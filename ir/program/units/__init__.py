"""Turns done in parts, unit by unit in an order that is data: their steps, values, forms and modules."""
