"""The builders of gated delta rules, which sort rows by masks."""
