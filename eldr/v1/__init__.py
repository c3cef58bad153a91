"""Generated protobuf and gRPC code of package `eldr.v1`. Made by `python -m eldr.rpc.generate`; never edited."""
