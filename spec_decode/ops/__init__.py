"""Operations of a round on the device, each with a torch formula and a kernel."""
