"""This package reads only those channels of an expert that matter for a token.

A channel is a row of the gate projection, a row of the up projection and a column of the down
projection. Every channel is screened by a ternary sketch of gate and up on rotated inputs; the best
are computed exactly, and a low-rank map of the down projection stands in for the rest (Kim & Hwang,
"Channel Selection for MoE Decoding Needs No Calibration Data"). `experts` joins the parts;
`traces.channels` counts the bytes.
"""
