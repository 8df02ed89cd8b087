// grpc-go as a client: `client HOST:PORT CELL MESSAGES IDLE_S`.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	health "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	pb "interop/inference"
)

const timeout = 600 * time.Second

var (
	conn     *grpc.ClientConn
	stub     pb.GRPCInferenceServiceClient
	messages int
	idleTime time.Duration
)

func check(good bool, format string, values ...interface{}) {
	if !good {
		fmt.Println(strings.ReplaceAll(fmt.Sprintf(format, values...), "\n", " "))
		os.Exit(1)
	}
}

func within(limit time.Duration) context.Context {
	ctx, _ := context.WithTimeout(context.Background(), limit)
	return ctx
}

func request(model string, values ...int32) *pb.ModelInferRequest {
	raw := make([]byte, 4*len(values))
	for i, value := range values {
		binary.LittleEndian.PutUint32(raw[4*i:], uint32(value))
	}
	input := &pb.ModelInferRequest_InferInputTensor{
		Name: "INPUT0", Datatype: "INT32", Shape: []int64{1, int64(len(values))}}
	return &pb.ModelInferRequest{ModelName: model,
		Inputs: []*pb.ModelInferRequest_InferInputTensor{input}, RawInputContents: [][]byte{raw}}
}

func infer(model string, values []int32, options ...grpc.CallOption) {
	asked := request(model, values...)
	answer, err := stub.ModelInfer(within(timeout), asked, options...)
	check(err == nil, "ModelInfer of %s: %v", model, err)
	check(bytes.Equal(answer.RawOutputContents[0], asked.RawInputContents[0]), "another answer than expected")
}

func upTo(count int) []int32 {
	values := make([]int32, count)
	for i := range values {
		values[i] = int32(i)
	}
	return values
}

type inferStream = pb.GRPCInferenceService_ModelStreamInferClient

func open(ctx context.Context, options ...grpc.CallOption) inferStream {
	stream, err := stub.ModelStreamInfer(ctx, options...)
	check(err == nil, "ModelStreamInfer: %v", err)
	return stream
}

func send(stream inferStream, asked ...*pb.ModelInferRequest) {
	for _, message := range asked {
		if stream.Send(message) != nil {
			return // Recv has the reason
		}
	}
}

// next returns the first number of the next answer; false at the stream's end.
func next(stream inferStream) (int32, bool) {
	for {
		answer, err := stream.Recv()
		if err == io.EOF {
			return 0, false
		}
		check(err == nil, "a stream ended: %v", err)
		check(answer.ErrorMessage == "", "a stream's answer: %s", answer.ErrorMessage)
		if raw := answer.InferResponse.RawOutputContents; len(raw) > 0 {
			return int32(binary.LittleEndian.Uint32(raw[0])), true
		}
	}
}

func expect(stream inferStream, from, to int) {
	for n := from; n < to; n++ {
		got, more := next(stream)
		check(more && got == int32(n), "answer %d is %d, %t", n, got, more)
	}
	_, more := next(stream)
	check(!more, "more than %d answers", to)
}

func fails(code codes.Code, err error) {
	check(status.Code(err) == code, "%v instead of %v", err, code)
}

func told(part string, pairs ...string) {
	ctx := metadata.AppendToOutgoingContext(within(timeout), pairs...)
	answer, err := stub.ModelInfer(ctx, request("told", 1))
	check(err == nil, "ModelInfer with metadata: %v", err)
	check(bytes.Contains(answer.RawOutputContents[0], []byte(part)), "metadata did not arrive")
}

func parameter(choice interface{}) *pb.InferParameter {
	if number, ok := choice.(int64); ok {
		return &pb.InferParameter{ParameterChoice: &pb.InferParameter_Int64Param{Int64Param: number}}
	}
	return &pb.InferParameter{ParameterChoice: &pb.InferParameter_BoolParam{BoolParam: choice.(bool)}}
}

type cells struct{}

func (cells) Unary() { infer("identity", upTo(1024)); infer("identity", upTo(4 << 20)) }

func (cells) Parallel() {
	var all sync.WaitGroup
	for caller := 0; caller < 50; caller++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for n := 0; n < 10; n++ {
				infer("identity", upTo(1024))
			}
		}()
	}
	all.Wait()
}

func (cells) Stream() {
	stream := open(within(timeout))
	go func() {
		for n := 0; n < messages; n++ {
			send(stream, request("identity", int32(n)))
		}
		stream.CloseSend()
	}()
	expect(stream, 0, messages)
}

func (cells) Decoupled() {
	stream := open(within(timeout))
	send(stream, request("count", 1000, 0))
	stream.CloseSend()
	expect(stream, 0, 1000)
}

func (cells) Sequence() {
	stream, id := open(within(timeout)), time.Now().UnixNano()
	for n := 0; n < 10; n++ {
		step := request("sum", int32(n))
		step.Parameters = map[string]*pb.InferParameter{"sequence_id": parameter(id),
			"sequence_start": parameter(n == 0), "sequence_end": parameter(n == 9)}
		send(stream, step)
	}
	stream.CloseSend()
	var last int32
	for total, more := next(stream); more; total, more = next(stream) {
		last = total
	}
	check(last == 45, "the sum is %d", last)
}

func (cells) Metadata() {
	long := strings.Repeat("a", 8192)
	told(long, "x-long", long, "x-interop-bin", string([]byte{0, 1, 254, 255}))
}

func (cells) Blanks() { told("both ends", "x-blanks", " both ends ") }

func (cells) Deadline() {
	_, err := stub.ModelInfer(within(200*time.Millisecond), request("slow", 2000))
	fails(codes.DeadlineExceeded, err)
	infer("identity", upTo(1))
}

func (cells) Cancel() {
	ctx, cancel := context.WithCancel(context.Background())
	stream := open(ctx)
	send(stream, request("count", 1000, 20))
	next(stream)
	cancel()
	var err error
	for err == nil {
		_, err = stream.Recv()
	}
	fails(codes.Canceled, err)
	ctx, cancel = context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	_, err = stub.ModelInfer(ctx, request("slow", 2000))
	fails(codes.Canceled, err)
	infer("identity", upTo(1))
}

func (cells) Half_close() {
	stream := open(within(timeout))
	send(stream, request("identity", 0), request("identity", 1), request("identity", 2))
	stream.CloseSend()
	expect(stream, 0, 3)
	stream = open(within(timeout))
	stream.CloseSend()
	expect(stream, 0, 0)
}

func (cells) Gzip() {
	infer("identity", upTo(65536), grpc.UseCompressor(gzip.Name))
	stream := open(within(timeout), grpc.UseCompressor(gzip.Name))
	send(stream, request("identity", 0), request("identity", 1))
	stream.CloseSend()
	expect(stream, 0, 2)
}

func (cells) Errors() {
	_, err := stub.ModelInfer(within(timeout), request("nosuch", 1))
	fails(codes.NotFound, err)
	check(strings.Contains(err.Error(), "nosuch"), "the error does not name the model: %v", err)
	method := "/inference.GRPCInferenceService/NoSuch"
	err = conn.Invoke(within(timeout), method, request("identity", 1), &pb.ModelInferResponse{})
	fails(codes.Unimplemented, err)
}

func (cells) Reflection() {
	stream, err := reflection.NewServerReflectionClient(conn).ServerReflectionInfo(within(timeout))
	check(err == nil, "reflection: %v", err)
	list := &reflection.ServerReflectionRequest_ListServices{}
	stream.Send(&reflection.ServerReflectionRequest{MessageRequest: list})
	answer, err := stream.Recv()
	check(err == nil, "reflection: %v", err)
	check(strings.Contains(answer.String(), "inference.GRPCInferenceService"), "no service in %v", answer)
}

func (cells) Health() {
	asked := health.NewHealthClient(conn)
	answer, err := asked.Check(within(timeout), &health.HealthCheckRequest{})
	check(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "health: %v %v", answer, err)
	_, err = asked.Check(within(timeout), &health.HealthCheckRequest{Service: "nosuch"})
	fails(codes.NotFound, err)
	watch, _ := asked.Watch(within(timeout), &health.HealthCheckRequest{})
	answer, err = watch.Recv()
	check(err == nil && answer.Status == health.HealthCheckResponse_SERVING, "watch: %v %v", answer, err)
}

func (cells) Idle() {
	stream := open(context.Background())
	send(stream, request("identity", 0))
	next(stream)
	time.Sleep(idleTime / 2)
	send(stream, request("identity", 1))
	stream.CloseSend()
	expect(stream, 1, 2)
	time.Sleep(idleTime / 2)
	infer("identity", upTo(1))
}

func (cells) Drain() {
	var all sync.WaitGroup
	for caller := 0; caller < 5; caller++ {
		all.Add(1)
		go func() { defer all.Done(); infer("slow", []int32{3000}) }()
	}
	stream := open(within(timeout))
	send(stream, request("count", 100, 30))
	stream.CloseSend()
	next(stream)
	time.Sleep(time.Second)
	fmt.Println("running")
	expect(stream, 1, 100)
	all.Wait()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		_, err := stub.ModelInfer(within(timeout), request("identity", 1), grpc.WaitForReady(true))
		if status.Code(err) != codes.Unavailable || time.Now().After(end) { // a proxy's word for no server
			check(err == nil, "ModelInfer of the successor: %v", err)
			return
		}
	}
}

func main() {
	messages, _ = strconv.Atoi(os.Args[3])
	seconds, _ := strconv.ParseFloat(os.Args[4], 64)
	idleTime = time.Duration(seconds * float64(time.Second))
	alive := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}
	var err error
	conn, err = grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithKeepaliveParams(alive),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	check(err == nil, "%v", err)
	stub = pb.NewGRPCInferenceServiceClient(conn)
	name := strings.ToUpper(os.Args[2][:1]) + os.Args[2][1:]
	reflect.ValueOf(cells{}).MethodByName(name).Call(nil)
	fmt.Println("ok")
}
