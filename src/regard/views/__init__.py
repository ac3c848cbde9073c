"""A before people's eyes: the terminal. A view asks A through its public methods, and does no softmax itself."""
