"""Interactive requests over gRPC (extra `grpc`): another face of `jobs/api`. `headrace.proto` says what there is.

`headrace_pb2*`, `health_pb2*` and `reflection_pb2*` are generated; in the repository's root:

    python -m grpc_tools.protoc -I typings --python_out=typings --pyi_out=typings --grpc_python_out=typings \
        headrace/jobs/grpc/headrace.proto headrace/jobs/grpc/health.proto headrace/jobs/grpc/reflection.proto
"""
