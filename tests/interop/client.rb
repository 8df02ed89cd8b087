# The gRPC of Ruby as a client: `client.rb HOST:PORT CELL MESSAGES IDLE_S`.
# frozen_string_literal: true

require 'grpc'
require 'grpc_health/v1/health_services_pb'
require 'grpc_service_services_pb'
require 'grpc_reflection/v1alpha/reflection_services_pb'

TARGET, CELL = ARGV
MESSAGES = Integer(ARGV[2])
IDLE_S = Float(ARGV[3])
CHANNEL = GRPC::Core::Channel.new(
  TARGET,
  { 'grpc.max_receive_message_length' => -1, 'grpc.keepalive_time_ms' => 10_000,
    'grpc.keepalive_permit_without_calls' => 1, 'grpc.http2.max_pings_without_data' => 0,
    'grpc.max_reconnect_backoff_ms' => 500 },
  :this_channel_is_insecure
)
STUB = Inference::GRPCInferenceService::Stub.new(TARGET, nil, channel_override: CHANNEL, timeout: 600 + IDLE_S)

def request(model, values, parameters = {})
  input = Inference::ModelInferRequest::InferInputTensor.new(
    name: 'INPUT0', datatype: 'INT32', shape: [1, values.size]
  )
  parameters = parameters.transform_values { |one| Inference::InferParameter.new(one) }
  Inference::ModelInferRequest.new(model_name: model, inputs: [input],
                                   raw_input_contents: [values.pack('l<*')], parameters: parameters)
end

def check(good, text)
  raise text unless good
end

def infer(values, model = 'identity', **options)
  asked = request(model, values)
  answer = STUB.model_infer(asked, **options)
  check(answer.raw_output_contents[0] == asked.raw_input_contents[0], 'another answer than expected')
end

# Yields the first number of each answer.
def answered(answers)
  return enum_for(:answered, answers) unless block_given?

  answers.each do |message|
    check(message.error_message.empty?, message.error_message)
    raw = message.infer_response.raw_output_contents
    yield raw[0].unpack1('l<') unless raw.empty?
  end
end

def stream(messages, **options)
  answered(STUB.model_stream_infer(messages, **options))
end

def counted(answers, range)
  check(answers.to_a == range.to_a, 'other answers than expected')
end

def fails(code, text = '')
  yield
rescue GRPC::BadStatus => e
  check(e.code == code && e.message.include?(text), "#{e.message} instead of status #{code}")
else
  raise "a call did not end with status #{code}"
end

def told(part, metadata)
  answer = STUB.model_infer(request('told', [1]), metadata: metadata)
  check(answer.raw_output_contents[0].include?(part), 'metadata did not arrive')
end

module Cells
  module_function

  def unary
    infer((0...1024).to_a)
    infer((0...(4 << 20)).to_a)
  end

  def parallel
    Array.new(50) { Thread.new { 10.times { infer((0...1024).to_a) } } }.each(&:join)
  end

  def stream
    counted(Object.send(:stream, (0...MESSAGES).lazy.map { |n| request('identity', [n]) }), 0...MESSAGES)
  end

  def decoupled
    counted(Object.send(:stream, [request('count', [1000, 0])]), 0...1000)
  end

  def sequence
    id = Process.clock_gettime(Process::CLOCK_REALTIME, :nanosecond)
    steps = (0...10).map do |n|
      request('sum', [n], 'sequence_id' => { int64_param: id }, 'sequence_start' => { bool_param: n.zero? },
                          'sequence_end' => { bool_param: n == 9 })
    end
    check(Object.send(:stream, steps).to_a.last == 45, 'the sum is wrong')
  end

  def metadata
    told('a' * 8192, 'x-long' => 'a' * 8192, 'x-interop-bin' => [0, 1, 254, 255].pack('C*'))
  end

  def blanks
    told('both ends', 'x-blanks' => ' both ends ')
  end

  def deadline
    fails(GRPC::Core::StatusCodes::DEADLINE_EXCEEDED) { infer([2000], 'slow', deadline: Time.now + 0.2) }
    infer([1])
  end

  def cancel
    operation = STUB.model_stream_infer([request('count', [1000, 20])], return_op: true)
    answers = answered(operation.execute)
    answers.next
    operation.cancel
    fails(GRPC::Core::StatusCodes::CANCELLED) { loop { answers.next } || raise('the stream ended') }
    operation = STUB.model_infer(request('slow', [2000]), return_op: true)
    Thread.new do
      sleep 0.2
      operation.cancel
    end
    fails(GRPC::Core::StatusCodes::CANCELLED) { operation.execute }
    infer([1])
  end

  def half_close
    counted(Object.send(:stream, (0...3).map { |n| request('identity', [n]) }), 0...3)
    counted(Object.send(:stream, []), [])
  end

  def gzip
    options = GRPC::Core::CompressionOptions.new(default_algorithm: :gzip)
    channel = GRPC::Core::Channel.new(TARGET, options.to_channel_arg_hash, :this_channel_is_insecure)
    stub = Inference::GRPCInferenceService::Stub.new(TARGET, nil, channel_override: channel)
    asked = request('identity', (0...65_536).to_a)
    check(stub.model_infer(asked).raw_output_contents[0] == asked.raw_input_contents[0], 'another answer')
    counted(answered(stub.model_stream_infer((0...3).map { |n| request('identity', [n]) })), 0...3)
  end

  def errors
    fails(GRPC::Core::StatusCodes::NOT_FOUND, 'nosuch') { infer([1], 'nosuch') }
    fails(GRPC::Core::StatusCodes::UNIMPLEMENTED) do
      client = GRPC::ClientStub.new(TARGET, nil, channel_override: CHANNEL)
      client.request_response('/inference.GRPCInferenceService/NoSuch', '', :itself.to_proc, :itself.to_proc)
    end
  end

  def reflection
    asked = Grpc::Reflection::V1alpha::ServerReflectionRequest.new(list_services: '')
    client = Grpc::Reflection::V1alpha::ServerReflection::Stub.new(TARGET, nil, channel_override: CHANNEL)
    names = client.server_reflection_info([asked]).first.list_services_response.service.map(&:name)
    check(names.include?('inference.GRPCInferenceService'), names.join(' '))
  end

  def health
    client = Grpc::Health::V1::Health::Stub.new(TARGET, nil, channel_override: CHANNEL)
    whole = Grpc::Health::V1::HealthCheckRequest.new
    check(client.check(whole).status == :SERVING, 'not serving')
    fails(GRPC::Core::StatusCodes::NOT_FOUND) do
      client.check(Grpc::Health::V1::HealthCheckRequest.new(service: 'nosuch'))
    end
    check(client.watch(whole).first.status == :SERVING, 'not serving, says the watch')
  end

  def idle
    again = Queue.new
    messages = Enumerator.new do |sent|
      sent << request('identity', [0])
      again.pop
      sent << request('identity', [1])
    end
    seen = []
    Object.send(:stream, messages).each do |number|
      seen << number
      next unless number.zero?

      sleep(IDLE_S / 2)
      again << true
    end
    counted(seen, [0, 1])
    sleep(IDLE_S / 2)
    infer([1])
  end

  def drain
    slow = Array.new(5) { Thread.new { infer([3000], 'slow') } }
    answers = Object.send(:stream, [request('count', [100, 30])])
    check(answers.next.zero?, 'the first answer')
    sleep 1
    puts 'running'
    $stdout.flush
    rest = []
    loop { rest << answers.next }
    counted(rest, 1...100)
    slow.each(&:join)
    infer_when_ready
  end

  # This library has no wait_for_ready.
  def infer_when_ready
    give_up = Time.now + 120
    begin
      infer([1])
    rescue GRPC::Unavailable
      raise if Time.now > give_up

      sleep 0.1
      retry
    end
  end
end

Thread.report_on_exception = false
begin
  Cells.send(CELL)
  puts 'ok'
rescue StandardError => e
  puts "#{e.class}: #{e.message}".tr("\n", ' ')
  exit 1
end
