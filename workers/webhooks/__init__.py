"""Delivery of signed webhooks to public addresses."""
