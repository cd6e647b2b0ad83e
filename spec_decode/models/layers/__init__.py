"""Building blocks of the models: decoder layers, attention, feed-forward, rotary embedding."""
