"""nn.Modules: parameters, projections, and an explicit state that goes in and comes out."""
