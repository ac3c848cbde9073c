"""A before people's eyes: the terminal here; every view asks A through its public methods and does no softmax itself."""
