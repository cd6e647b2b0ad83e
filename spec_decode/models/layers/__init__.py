"""What models are made of: decoder layers, attention, feed-forward, rotary embedding."""
