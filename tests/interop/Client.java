// gRPC's Java library as a client: `Client HOST:PORT CELL MESSAGES IDLE_S`.
import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GrpcService.InferParameter;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferResponse;
import inference.GrpcService.ModelStreamInferResponse;
import io.grpc.*;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.*;
import java.nio.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.IntStream;

public class Client {
  static ManagedChannel channel;
  static GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub stub;
  static int messages;
  static double idle;

  static void check(boolean good, String text) {
    if (!good) throw new IllegalStateException(text);
  }

  static void nap(double seconds) throws Exception { Thread.sleep((long) (1000 * seconds)); }

  static int[] upTo(int count) { return IntStream.range(0, count).toArray(); }

  static ModelInferRequest.Builder request(String model, int... values) {
    ByteBuffer raw = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    raw.asIntBuffer().put(values);
    return ModelInferRequest.newBuilder().setModelName(model)
        .addInputs(ModelInferRequest.InferInputTensor.newBuilder()
            .setName("INPUT0").setDatatype("INT32").addShape(1).addShape(values.length))
        .addRawInputContents(ByteString.copyFrom(raw));
  }

  static void infer(GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub by, String model, int... values) {
    ModelInferRequest asked = request(model, values).build();
    ByteString raw = by.modelInfer(asked).getRawOutputContents(0);
    check(raw.equals(asked.getRawInputContents(0)), "another answer than expected");
  }

  static void fails(Status.Code code, String text, Callable<?> call) throws Exception {
    try {
      call.call();
    } catch (StatusRuntimeException error) {
      Status status = error.getStatus();
      check(status.getCode() == code && String.valueOf(status.getDescription()).contains(text), "" + status);
      return;
    }
    throw new IllegalStateException("a call did not end with " + code);
  }

  /** A stream; `answers` has the first number of each answer, and at last an Integer.MIN_VALUE. */
  static class Stream implements ClientResponseObserver<ModelInferRequest, ModelStreamInferResponse> {
    final BlockingQueue<Integer> answers = new LinkedBlockingQueue<>();
    final Semaphore ready = new Semaphore(0);
    volatile Throwable failure;
    ClientCallStreamObserver<ModelInferRequest> sent;

    Stream(String compression) {
      GRPCInferenceServiceGrpc.GRPCInferenceServiceStub async = GRPCInferenceServiceGrpc.newStub(channel);
      (compression == null ? async : async.withCompression(compression)).modelStreamInfer(this);
    }

    public void beforeStart(ClientCallStreamObserver<ModelInferRequest> stream) {
      sent = stream;
      stream.setOnReadyHandler(ready::release);
    }

    public void onNext(ModelStreamInferResponse answer) {
      if (!answer.getErrorMessage().isEmpty()) onError(new IllegalStateException(answer.getErrorMessage()));
      for (ByteString raw : answer.getInferResponse().getRawOutputContentsList())
        answers.add(raw.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).getInt());
    }

    public void onError(Throwable error) {
      failure = error;
      onCompleted();
    }

    public void onCompleted() {
      answers.add(Integer.MIN_VALUE);
      ready.release(1 << 20);
    }

    void send(int from, int to) throws Exception {
      for (int n = from; n < to; n++) {
        while (!sent.isReady() && failure == null) ready.acquire();
        if (failure != null) return;
        sent.onNext(request("identity", n).build());
      }
    }

    int next() throws Exception {
      int answer = answers.take();
      if (failure != null && answer == Integer.MIN_VALUE) throw new IllegalStateException(failure);
      return answer;
    }

    void expect(int from, int to) throws Exception {
      sent.onCompleted();
      for (int n = from; n < to; n++) check(next() == n, "answer " + n + " is missing");
      check(next() == Integer.MIN_VALUE, "more answers than expected");
    }
  }

  static Metadata one(String name, String value) {
    Metadata made = new Metadata();
    made.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value);
    return made;
  }

  static void told(String part, Metadata metadata) {
    ModelInferResponse answer =
        MetadataUtils.attachHeaders(stub, metadata).modelInfer(request("told", 1).build());
    check(answer.getRawOutputContents(0).toStringUtf8().contains(part), "metadata did not arrive");
  }

  static void atOnce(int callers, int each, String model, int... values) throws Exception {
    ExecutorService pool = Executors.newFixedThreadPool(callers);
    List<Future<?>> calls = new ArrayList<>();
    for (int n = 0; n < callers * each; n++) calls.add(pool.submit(() -> infer(stub, model, values)));
    try {
      for (Future<?> call : calls) call.get();
    } finally {
      pool.shutdown();
    }
  }

  static void run(String cell) throws Exception {
    Stream stream;
    switch (cell) {
      case "unary":
        infer(stub, "identity", upTo(1024));
        infer(stub, "identity", upTo(4 << 20));
        return;
      case "parallel":
        atOnce(50, 10, "identity", upTo(1024));
        return;
      case "stream":
        stream = new Stream(null);
        stream.send(0, messages);
        stream.expect(0, messages);
        return;
      case "decoupled":
        stream = new Stream(null);
        stream.sent.onNext(request("count", 1000, 0).build());
        stream.expect(0, 1000);
        return;
      case "sequence":
        stream = new Stream(null);
        InferParameter id = InferParameter.newBuilder().setInt64Param(System.nanoTime()).build();
        for (int n = 0; n < 10; n++)
          stream.sent.onNext(request("sum", n).putParameters("sequence_id", id)
              .putParameters("sequence_start", InferParameter.newBuilder().setBoolParam(n == 0).build())
              .putParameters("sequence_end", InferParameter.newBuilder().setBoolParam(n == 9).build()).build());
        stream.sent.onCompleted();
        int last = 0;
        for (int total = stream.next(); total != Integer.MIN_VALUE; total = stream.next()) last = total;
        check(last == 45, "the sum is " + last);
        return;
      case "metadata":
        Metadata metadata = one("x-long", "a".repeat(8192));
        byte[] bytes = {0, 1, -2, -1};
        metadata.put(Metadata.Key.of("x-interop-bin", Metadata.BINARY_BYTE_MARSHALLER), bytes);
        told("a".repeat(8192), metadata);
        return;
      case "blanks":
        told("both ends", one("x-blanks", " both ends "));
        return;
      case "deadline":
        fails(Status.Code.DEADLINE_EXCEEDED, "", () ->
            stub.withDeadlineAfter(200, TimeUnit.MILLISECONDS).modelInfer(request("slow", 2000).build()));
        infer(stub, "identity", 1);
        return;
      case "cancel":
        stream = new Stream(null);
        stream.sent.onNext(request("count", 1000, 20).build());
        stream.next();
        stream.sent.cancel("enough", null);
        while (stream.answers.take() != Integer.MIN_VALUE) {}
        check(Status.fromThrowable(stream.failure).getCode() == Status.Code.CANCELLED, "" + stream.failure);
        Context.CancellableContext context = Context.current().withCancellation();
        new Timer(true).schedule(new TimerTask() { public void run() { context.cancel(null); } }, 200);
        fails(Status.Code.CANCELLED, "", () ->
            context.call(() -> stub.modelInfer(request("slow", 2000).build())));
        infer(stub, "identity", 1);
        return;
      case "half_close":
        stream = new Stream(null);
        stream.send(0, 3);
        stream.expect(0, 3);
        new Stream(null).expect(0, 0);
        return;
      case "gzip":
        infer(stub.withCompression("gzip"), "identity", upTo(65536));
        stream = new Stream("gzip");
        stream.sent.setMessageCompression(true);
        stream.send(0, 3);
        stream.expect(0, 3);
        return;
      case "errors":
        fails(Status.Code.NOT_FOUND, "nosuch", () -> stub.modelInfer(request("nosuch", 1).build()));
        MethodDescriptor<ModelInferRequest, ModelInferResponse> unknown =
            GRPCInferenceServiceGrpc.getModelInferMethod().toBuilder()
                .setFullMethodName("inference.GRPCInferenceService/NoSuch").build();
        fails(Status.Code.UNIMPLEMENTED, "", () -> ClientCalls.blockingUnaryCall(
            channel, unknown, CallOptions.DEFAULT, request("identity", 1).build()));
        return;
      case "reflection":
        reflection();
        return;
      case "health":
        HealthGrpc.HealthBlockingStub health = HealthGrpc.newBlockingStub(channel);
        HealthCheckRequest whole = HealthCheckRequest.getDefaultInstance();
        check(health.check(whole).getStatus() == ServingStatus.SERVING, "not serving");
        fails(Status.Code.NOT_FOUND, "", () -> health.check(whole.toBuilder().setService("nosuch").build()));
        check(health.watch(whole).next().getStatus() == ServingStatus.SERVING, "not serving, says the watch");
        return;
      case "idle":
        stream = new Stream(null);
        stream.send(0, 1);
        check(stream.next() == 0, "the first answer");
        nap(idle / 2);
        stream.send(1, 2);
        stream.expect(1, 2);
        nap(idle / 2);
        infer(stub, "identity", 1);
        return;
      case "drain":
        FutureTask<Void> slow = new FutureTask<>(() -> { atOnce(5, 1, "slow", 3000); return null; });
        new Thread(slow).start();
        stream = new Stream(null);
        stream.sent.onNext(request("count", 100, 30).build());
        stream.next();
        nap(1);
        System.out.println("running");
        stream.expect(1, 100);
        slow.get();
        long end = System.nanoTime() + TimeUnit.MINUTES.toNanos(2);
        while (true)
          try {
            infer(stub.withWaitForReady(), "identity", 1);
            return;
          } catch (StatusRuntimeException error) { // the successor may not have its models yet
            if (error.getStatus().getCode() != Status.Code.UNAVAILABLE || System.nanoTime() > end) throw error;
            nap(0.1);
          }
      default:
        throw new IllegalArgumentException(cell);
    }
  }

  static void reflection() throws Exception {
    CompletableFuture<String> told = new CompletableFuture<>();
    grpc.reflection.v1alpha.ServerReflectionGrpc.newStub(channel)
        .serverReflectionInfo(new StreamObserver<grpc.reflection.v1alpha.Reflection.ServerReflectionResponse>() {
          public void onNext(grpc.reflection.v1alpha.Reflection.ServerReflectionResponse answer) {
            told.complete(answer.toString());
          }
          public void onError(Throwable error) { told.completeExceptionally(error); }
          public void onCompleted() { told.complete("nothing"); }
        })
        .onNext(grpc.reflection.v1alpha.Reflection.ServerReflectionRequest.newBuilder().setListServices("").build());
    check(told.get().contains("inference.GRPCInferenceService"), told.get());
  }

  public static void main(String[] args) {
    messages = Integer.parseInt(args[2]);
    idle = Double.parseDouble(args[3]);
    channel = NettyChannelBuilder.forTarget(args[0]).usePlaintext().maxInboundMessageSize(1 << 30)
        .keepAliveTime(10, TimeUnit.SECONDS).keepAliveWithoutCalls(true).build();
    stub = GRPCInferenceServiceGrpc.newBlockingStub(channel);
    int status = 0;
    try {
      run(args[1]);
      System.out.println("ok");
    } catch (Throwable error) {
      System.out.println(("" + error).replace("\n", " "));
      status = 1;
    }
    System.exit(status);
  }
}
